"""Images and videos of chat messages: from where they come, how they are decoded, and where they stand in the prompt."""
