//! Tiny agents, one per behavior. Each is an example target of this package, which the integration tests
//! build to a component.
//!
//! The header of a guest's file says what the guest does and which texts select its variants. Native builds
//! of the guests are useless, because the exports exist only in WebAssembly. Components that no toolchain
//! generates are text in `components`.

/// The Rust blocks of the guides, as doc tests. Blocks that a page writes to a file are compiled by its commands.
#[cfg(doctest)]
// The words after a fence's language are for the test of the guides.
#[allow(rustdoc::invalid_codeblock_attributes)]
mod guide {
    #[doc = include_str!("../../../guest-sdk/guide/first-agent.md")]
    mod first_agent {}
    #[doc = include_str!("../../../guest-sdk/guide/instructions.md")]
    mod instructions {}
    #[doc = include_str!("../../../guest-sdk/guide/tools.md")]
    mod tools {}
    #[doc = include_str!("../../../guest-sdk/guide/structured-output.md")]
    mod structured_output {}
    #[doc = include_str!("../../../guest-sdk/guide/state-and-sessions.md")]
    mod state_and_sessions {}
    #[doc = include_str!("../../../guest-sdk/guide/schedules.md")]
    mod schedules {}
    #[doc = include_str!("../../../guest-sdk/guide/events.md")]
    mod events {}
    #[doc = include_str!("../../../guest-sdk/guide/approvals.md")]
    mod approvals {}
    #[doc = include_str!("../../../guest-sdk/guide/agents-that-call-agents.md")]
    mod agents_that_call_agents {}
    #[doc = include_str!("../../../guest-sdk/guide/http-and-secrets.md")]
    mod http_and_secrets {}
    #[doc = include_str!("../../../guest-sdk/guide/testing.md")]
    mod testing {}
    #[doc = include_str!("../../../guest-sdk/guide/any-language.md")]
    mod any_language {}
    #[doc = include_str!("../../../host/guide/mcp.md")]
    mod mcp {}
}
