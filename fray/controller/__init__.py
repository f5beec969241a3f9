"""The controller: hands for the law. It saves what the law decides, then tells those whom it concerns."""
