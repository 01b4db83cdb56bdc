"""The policy, its references and its log-probabilities, on DeepSpeed and Hugging Face."""
