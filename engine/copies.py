"""To come."""


class BlockCopier:
    def __init__(self, geometry, memory):
        self.g, self.m = geometry, memory

    def copy(self, copies):
        for c in copies:
            g = self.g.group(c.group)
            for layer in g.layers:
                for h in range(g.num_heads):
                    for t in range(self.g.tokens_per_block(g)):
                        o = layer.offset + h * layer.head_stride + t * layer.token_stride
                        s, d = o + c.source * layer.block_stride, o + c.destination * layer.block_stride
                        self.m[d : d + g.content_bytes] = self.m[s : s + g.content_bytes]
