"""How long a decoding step would take on a card: recorded launches, published constants, the host beside the device."""
