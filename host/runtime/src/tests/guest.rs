//! Components built from WebAssembly text. Each has all exports; a test writes only the
//! instructions that matter.

use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// A guest whose reply is the text at `$text`/`$length`, which initially is the message's text.
#[derive(Default)]
pub(super) struct Guest {
    /// WIT imports of the world beyond `skep:agent`.
    pub(super) world: &'static str,
    /// WIT packages that the world refers to.
    pub(super) packages: &'static [&'static str],
    /// Core imports and anything else at the top of the module.
    pub(super) module: &'static str,
    pub(super) describe: &'static str,
    /// Body with the locals `$message` (its record), `$text` and `$length` (the reply), and `$a`
    /// and `$b` (free).
    pub(super) on_message: &'static str,
    /// Size of the memory in pages of 64 KiB.
    pub(super) pages: u32,
}

/// Echoes every message.
pub(super) fn echo() -> Guest {
    Guest::default()
}

/// Counts the session's turns in its state. The reply has that many letters.
pub(super) fn counter() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/state@0.1.1" "get" (func $get (param i32 i32 i32)))
            (import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))
            (data (i32.const 512) "nxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")"#,
        on_message: r#"
            (call $get (i32.const 512) (i32.const 1) (i32.const 600))
            (local.set $length (i32.const 1))
            (if (i32.load8_u (i32.const 600))
                (then (local.set $length (i32.add (i32.const 1) (i32.load (i32.const 608))))))
            (local.set $text (i32.const 513))
            (call $set (i32.const 512) (i32.const 1) (local.get $text) (local.get $length) (i32.const 640))
            ;; "!" fails after the write.
            (if (i32.eq (i32.load8_u (i32.load (local.get $message))) (i32.const 33)) (then unreachable))"#,
        ..Guest::default()
    }
}

/// Loops forever on a message that starts with "s", and echoes others.
pub(super) fn spinner() -> Guest {
    Guest {
        on_message: r#"
            (if (i32.eq (i32.load8_u (local.get $text)) (i32.const 115)) (then (loop $again (br $again))))"#,
        ..Guest::default()
    }
}

impl Guest {
    pub(super) fn component(&self) -> Vec<u8> {
        component(&self.text(), self.packages, &format!("include skep:agent/agent@0.1.1; {}", self.world))
    }

    /// Writes the module. Memory layout: 64 the description, 128 the reply, 256 to 511 scratch space of the frame, 512
    /// and up the guest's own data, from 8192 data that the host passes in.
    pub(super) fn text(&self) -> String {
        let Guest { module, describe, on_message, pages, .. } = self;
        let pages = (*pages).max(1);
        format!(
            r#"(module
            {module}
            (memory (export "memory") {pages})
            (global $free (mut i32) (i32.const 8192))
            (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
                (local $at i32)
                (local.set $at (i32.and (i32.add (global.get $free) (i32.const 7)) (i32.const -8)))
                (global.set $free (i32.add (local.get $at) (local.get 3)))
                (local.get $at))
            (data (i32.const 16) "described")
            (data (i32.const 64) "\10\00\00\00\09\00\00\00")
            (func (export "skep:agent/handler@0.1.1#describe") (result i32) {describe} (i32.const 64))
            (func $recurse (param i32) (result i32)
                (i32.add (i32.const 1) (call $recurse (i32.add (local.get 0) (i32.const 1)))))
            (func (export "skep:agent/handler@0.1.1#on-message") (param $message i32) (result i32)
                (local $text i32) (local $length i32) (local $a i32) (local $b i32)
                (local.set $text (i32.load (local.get $message)))
                (local.set $length (i32.load offset=4 (local.get $message)))
                {on_message}
                (i32.store offset=4 (i32.const 128) (local.get $text))
                (i32.store offset=8 (i32.const 128) (local.get $length))
                (i32.const 128)))"#
        )
    }
}

/// Builds a component for a world with the contents `world`.
pub(super) fn component(module: &str, packages: &[&str], world: &str) -> Vec<u8> {
    let mut module = wat::parse_str(module).expect("the text is WebAssembly");
    let mut resolve = Resolve::default();
    let wit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit/skep-agent");
    resolve.push_dir(wit).expect("the package is WIT");
    for (index, package) in packages.iter().enumerate() {
        resolve.push_str(format!("{index}.wit"), package).expect("the package is WIT");
    }
    let world = format!("package skep:test; world test {{ {world} }}");
    let package = resolve.push_str("test.wit", &world).expect("the world is WIT");
    let world = resolve.select_world(&[package], Some("test")).expect("it was just added");
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).expect("the world is valid");
    ComponentEncoder::default()
        .validate(true)
        .module(&module)
        .and_then(|mut encoder| encoder.encode())
        .expect("the module fits the world")
}
