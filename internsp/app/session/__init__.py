"""What a run consists of: model, optimizer, data, made from a configuration."""
