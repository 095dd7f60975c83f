"""The HTTP routes and what they share: state, authentication, answers, events."""
