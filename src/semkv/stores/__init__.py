"""What is kept between requests: catalog, responses, media, KV blocks, fusion states."""
