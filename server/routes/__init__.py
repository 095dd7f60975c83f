"""The HTTP routes of all APIs, and what they share: state, authentication, answers, events."""
