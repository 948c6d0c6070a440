"""A trained adapter on its way out: as a PEFT folder, or merged into the base and written as a checkpoint."""
