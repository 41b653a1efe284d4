"""Flash attention's backward pass in NumPy: tiles of the scores, one number a query, and nothing of length times length."""

import numpy as np

rng = np.random.default_rng(0)
n, d, tile = 64, 16, 16
Q, K, V, dO = rng.standard_normal((4, n, d))
scale = 1 / np.sqrt(d)

# ANCHOR: plain
S = scale * Q @ K.T
P = np.exp(S - S.max(1, keepdims=True))
P /= P.sum(1, keepdims=True)
O = P @ V
dP = dO @ V.T
dS = P * (dP - (dP * P).sum(1, keepdims=True))
plain = scale * dS @ K, scale * dS.T @ Q, P.T @ dO
# ANCHOR_END: plain

lse = S.max(1) + np.log(np.exp(S - S.max(1, keepdims=True)).sum(1))
pieces = []


# ANCHOR: tiles
def backward(Q, K, V, O, lse, dO):
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    delta = (dO * O).sum(1)  # one number for each query, without a sum over keys
    for s in range(0, n, tile):
        for t in range(0, n, tile):
            q, k = slice(s, s + tile), slice(t, t + tile)
            P = np.exp(scale * Q[q] @ K[k].T - lse[q, None])
            dS = P * (dO[q] @ V[k].T - delta[q, None])
            dQ[q] += scale * dS @ K[k]
            dK[k] += scale * dS.T @ Q[q]
            dV[k] += P.T @ dO[q]
            pieces.append(P.size)
    return dQ, dK, dV


# ANCHOR_END: tiles


for name, mine, theirs in zip(("dQ", "dK", "dV"), backward(Q, K, V, O, lse, dO), plain, strict=True):
    same = "the same" if np.allclose(mine, theirs, rtol=1e-10, atol=1e-12) else "different"
    print(f"{name}: {same} to ten digits")
print(f"kept for the backward pass, in addition to Q, K, V and O: {lse.size} numbers; P has {P.size:,}")
print(f"computed P in {len(pieces)} pieces, of which the largest has {max(pieces)} numbers")
delta, collapsed = (dO * O).sum(1), (dP * P).sum(1)
print(f"delta two ways, query 0: {delta[0]:.6f} and {collapsed[0]:.6f}")

keep = rng.random((n, n)) > 0.1
dropped, arriving = (
    P * keep / 0.9,
    dO @ V.T * keep / 0.9,
)  # a weight stays or is zero, and so does its gradient
delta, collapsed = (dO * (dropped @ V)).sum(1), (arriving * P).sum(1)
print(f"with dropout, delta two ways, query 0: {delta[0]:.6f} and {collapsed[0]:.6f}")


def loss(S, dL=0.7):
    """A loss with the gradient dO at the output and dL at the log-sum-exp, of query 0 alone."""
    return (dO[0] * (np.exp(S) / np.exp(S).sum() @ V)).sum() + dL * np.log(np.exp(S).sum())


nudge = 1e-6 * (np.arange(n) == 3)
slope = (loss(S[0] + nudge) - loss(S[0] - nudge)) / 2e-6
exact = P[0, 3] * (dP[0, 3] - ((dO * O).sum(1)[0] - 0.7))
print(f"lse with a gradient of 0.7, dS of query 0 and key 3: nudged {slope:.6f}, by D - 0.7 {exact:.6f}")
