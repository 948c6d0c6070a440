"""Everything that turns prompts into graded samples."""
