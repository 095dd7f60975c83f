"""Prepares videos: from a video file, an animation or a list of frames to temporal patches."""
