"""What grammars cost and hold: a token under a mask, requests over HTTP, folders of schemas."""
