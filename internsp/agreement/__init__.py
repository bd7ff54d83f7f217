"""What ranks must agree on before they exchange messages."""
