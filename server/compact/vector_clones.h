// Loops that the compiler vectorises for the machine it runs on: the build's floor is x86-64-v2. Sanitizers and other
// compilers get the plain version.
#ifndef STILLHOUSE_SERVER_COMPACT_VECTOR_CLONES_H_
#define STILLHOUSE_SERVER_COMPACT_VECTOR_CLONES_H_

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define STILLHOUSE_VECTOR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define STILLHOUSE_VECTOR_CLONES
#endif

#endif  // STILLHOUSE_SERVER_COMPACT_VECTOR_CLONES_H_
