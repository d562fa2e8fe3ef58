//! Tiny agents, one per behavior. Each is an example target of this package, which the integration tests
//! build to a component.
//!
//! The header of a guest's file says what the guest does and which texts select its variants. Native builds
//! of the guests are useless, because the exports exist only in WebAssembly. Components that no toolchain
//! generates are text in `components`.
