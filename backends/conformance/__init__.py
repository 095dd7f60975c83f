"""What every backend must hold, as named checks that run over any device. ``trencadis check-backend`` prints them."""
