"""To come."""


class Zeroer:
    def __init__(self, geometry, memory):
        self.g, self.m = geometry, memory

    def zero(self, ids):
        for name, blocks in ids.items():
            g = self.g.group(name)
            for layer in g.layers:
                for b in blocks:
                    o = layer.offset + b * layer.block_stride
                    for h in range(g.num_heads):
                        for t in range(self.g.tokens_per_block(g)):
                            c = o + h * layer.head_stride + t * layer.token_stride
                            self.m[c : c + g.content_bytes] = 0
