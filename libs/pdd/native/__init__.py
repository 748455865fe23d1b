"""The dense decoder's forward pass in C++, for CPUs with AVX-512 and its bfloat16 products.

`src/` holds the kernels, `build` compiles them, `library` binds them, `decoder` holds the `NativeDecoder` over them.
Results agree with the plain torch path within rounding, and do not depend on what else is in the batch.
"""
