"""Which ids a choice may draw next: rules, and the matchers that follow a choice's tokens to fill its mask."""
