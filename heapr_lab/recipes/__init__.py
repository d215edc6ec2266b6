"""How the weights of a pruned model are made of a mask, checked and written."""
