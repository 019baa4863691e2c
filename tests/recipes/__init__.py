"""Programs that train with mixed precision: by the recipe, and against one rule of it."""
