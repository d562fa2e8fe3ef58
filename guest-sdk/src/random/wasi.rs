//! `wasi:random`, which the host answers from the turn's seed.
//!
//! It is bound separately from `skep:agent`, so that only components that draw random numbers import it.

mod bindings {
    #![allow(missing_docs, rust_2018_idioms, clippy::all)]

    wit_bindgen::generate!({
        inline: "
            package skep:sdk;

            world draws {
                import wasi:random/random@0.2.0;
            }

            package wasi:random@0.2.0 {
                interface random {
                    get-random-u64: func() -> u64;
                }
            }
        ",
        world: "skep:sdk/draws",
        generate_all,
    });
}

pub use bindings::wasi::random::random::get_random_u64 as random;
