"""The images of the demo: scenes, shapes, colours, digits and textures."""
