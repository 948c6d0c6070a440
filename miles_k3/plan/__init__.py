"""What a recipe takes of each rank's memory, phase by phase, from the parameter table and the layout; without torch."""
