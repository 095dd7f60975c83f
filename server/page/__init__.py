"""The web page at ``/``: HTML, CSS and ES modules as they are sent, and the routes that send them."""
