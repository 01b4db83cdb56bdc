"""DeepSpeed and Hugging Face: the policy, its references and its log-probabilities."""
