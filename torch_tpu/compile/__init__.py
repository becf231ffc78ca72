"""``torch.compile`` on tpu: Dynamo and AOTAutograd give a graph, the rules of the operators make it one program."""
