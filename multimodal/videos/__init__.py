"""From a video file, an animation or a list of frames to temporal patches."""
