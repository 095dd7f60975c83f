"""What is drawn: scenes, shapes, colours, digits and textures."""
