"""Tool calls: the parsers that find them in an answer, one for each way in which models write them."""
