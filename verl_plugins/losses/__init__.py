"""Policy losses: the choice (`trust_region`), what the engine measured (`signals`), the loss itself (`policy`)."""
