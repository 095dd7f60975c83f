"""Who a request belongs to, what it may ask for, and what each tenant has used."""
