"""What is kept between requests: catalog, media, KV blocks, fusion states."""
