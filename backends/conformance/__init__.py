"""The rules for every backend as named checks, which ``trencadis check-backend`` runs on any device."""
