"""From a video file or a list of frames to temporal patches."""
