"""Resources of attempts: `allocator` gives them out, `allocation` is what one attempt got."""
