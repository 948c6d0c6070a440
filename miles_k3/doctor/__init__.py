"""What of a machine, a recipe or a run keeps the product from working, each with its way out."""
