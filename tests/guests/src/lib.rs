//! One tiny agent per behaviour, each an example target of this package, built to a component by the integration tests.
//!
//! A guest's file says what it does and which texts choose between its sub-behaviours. Natively they compile to nothing
//! of use: the exports exist only in WebAssembly. What no toolchain builds is text in `components`.
