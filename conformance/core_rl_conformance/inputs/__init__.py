"""What engines are asked: tiny models, ragged batches, losses."""
