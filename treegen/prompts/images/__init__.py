"""Images in prompts: opened, hashed, and placed among token ids."""
