"""What each picture shows, as plain arrays and words: chosen, aggregated, not drawn. Two renderers draw it."""
