"""The web page at ``/``: its HTML, CSS and ES modules, and the routes that send them."""
