"""Toolkit for engines over Hugging Face models: building, packed attention, heads, LoRA, optimizer."""
