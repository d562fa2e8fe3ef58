//! A component that calls the host's functions with arbitrary arguments, like a hostile guest.
//!
//! Its module is generated from the WIT package: each imported function is one case of a jump table, and its
//! parameters are read from the input one after the other in their WebAssembly form: pointers, lengths,
//! handles, variant cases.

use std::fmt::Write;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::{
    Resolve, WorldId, WorldItem,
    abi::{AbiVariant, WasmType},
};

/// Address of the program in the guest's memory, first as sent and then decoded.
const PROGRAM: usize = 0x2_0000;
pub(crate) const PROGRAM_BYTES: usize = 0x8000;
/// Texts that calls can point to, stored from `TEXTS_AT` on.
const TEXTS_AT: usize = 0x400;
const TEXTS: [&str; 10] = [
    "main",
    "tiny",
    "hello",
    "{\"a\":1}",
    "http://127.0.0.1:9/",
    "GET",
    "* * * * *",
    "UTC",
    "agent:caller/x",
    "order.paid",
];
/// Address to which results are written.
const RESULTS_AT: i32 = 0x1000;

/// Returns calls of each function with plausible arguments.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let (resolve, world) = resolved();
    let functions = functions(&resolve, world);
    let texts: Vec<(i32, i32)> =
        (0..TEXTS.len()).map(|index| (text_at(index), TEXTS[index].len() as i32)).collect();
    let mut seeds = Vec::new();
    for (number, function) in functions.iter().enumerate() {
        for variant in 0..3 {
            let mut call = vec![number as u8];
            let last = function.parameters.len().saturating_sub(1);
            let mut text = texts.iter().cycle().skip(variant * 3 + number);
            let mut is_length = None;
            for (place, parameter) in function.parameters.iter().enumerate() {
                let value = match (variant, is_length.take()) {
                    _ if place == last && function.has_result_pointer => RESULTS_AT,
                    (_, Some(length)) => length,
                    // The first resource has the handle 1.
                    (0, None) if place == 0 && function.is_method => 1,
                    (2, None) if place % 2 == 1 => 0,
                    _ => {
                        let (at, length) = text.next().copied().unwrap_or_default();
                        is_length = Some(length);
                        at
                    }
                };
                let bytes = i64::from(value).to_le_bytes();
                call.extend(&bytes[..size(*parameter)]);
            }
            seeds.push(call);
        }
    }
    // Add all calls in sequence, so that methods find their resource.
    seeds.push(seeds.concat());
    seeds
}

/// Returns the component.
pub(crate) fn caller() -> Vec<u8> {
    let (resolve, world) = resolved();
    encode(&resolve, world, &module(&functions(&resolve, world)))
}

/// Returns a component that appends its message to a conversation and echoes the message.
pub(crate) fn chatter() -> Vec<u8> {
    let (resolve, world) = resolved();
    let open = r#"(import "skep:agent/inference@0.1.1" "[static]conversation.open"
                      (func $open (param i32 i32 i32 i32 i32 i32)))
                  (import "skep:agent/inference@0.1.1" "[method]conversation.append-user"
                      (func $append (param i32 i32 i32 i32)))
                  (import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))"#;
    let on_message = format!(
        "(call $open (i32.const {0}) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const {1}))
         (call $append (i32.load offset=4 (i32.const {1})) (i32.load (local.get 0)) (i32.load offset=4 (local.get 0)) (i32.const {1}))
         (call $set (i32.const {0}) (i32.const 4) (i32.const {0}) (i32.const 4) (i32.const {1}))",
        text_at(0),
        RESULTS_AT
    );
    encode(&resolve, world, &around(open, &on_message, ""))
}

struct Function {
    interface: String,
    name: String,
    parameters: Vec<WasmType>,
    results: Vec<WasmType>,
    has_result_pointer: bool,
    is_method: bool,
}

fn resolved() -> (Resolve, WorldId) {
    let mut resolve = Resolve::default();
    let wit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit/skep-agent");
    resolve.push_dir(wit).expect("the package is WIT");
    let text = "package skep:test; world test { include skep:agent/agent@0.1.1; }";
    let package = resolve.push_str("test.wit", text).expect("the world is WIT");
    let world = resolve.select_world(&[package], Some("test")).expect("it was just added");
    (resolve, world)
}

/// Returns the imports of the world, except functions that need more than plain values (`stream`).
fn functions(resolve: &Resolve, world: WorldId) -> Vec<Function> {
    let mut found = Vec::new();
    for (key, item) in &resolve.worlds[world].imports {
        let WorldItem::Interface { id, .. } = item else { continue };
        for (name, function) in &resolve.interfaces[*id].functions {
            if name.ends_with(".stream") {
                continue;
            }
            let signature = resolve.wasm_signature(AbiVariant::GuestImport, function);
            found.push(Function {
                interface: resolve.name_world_key(key),
                name: name.clone(),
                parameters: signature.params,
                results: signature.results,
                has_result_pointer: signature.retptr,
                is_method: name.starts_with("[method]"),
            });
        }
    }
    found
}

fn module(functions: &[Function]) -> String {
    let (mut imports, mut cases, mut blocks) = (String::new(), String::new(), String::new());
    for (number, function) in functions.iter().enumerate() {
        let Function { interface, name, parameters, results, .. } = function;
        let types = |types: &[WasmType]| types.iter().map(|one| wat_type(*one)).collect::<Vec<_>>().join(" ");
        let mut signature = String::new();
        if !parameters.is_empty() {
            let _ = write!(signature, "(param {})", types(parameters));
        }
        if !results.is_empty() {
            let _ = write!(signature, " (result {})", types(results));
        }
        let _ = writeln!(imports, "(import \"{interface}\" \"{name}\" (func $f{number} {signature}))");
        let reads: String = parameters.iter().map(|one| format!("(call $read_{})", wat_type(*one))).collect();
        let drops = "(drop)".repeat(results.len());
        let _ = writeln!(cases, ") {reads} (call $f{number}) {drops} (br $again)");
        blocks.push_str("(block ");
    }
    let numbers: String = (0..functions.len()).map(|number| format!("{number} ")).collect();
    let last = functions.len().saturating_sub(1);
    // The blocks are entered by the number of the call; the innermost block is the first.
    let on_message = format!(
        "(call $decode (i32.load (local.get 0)) (i32.load offset=4 (local.get 0)))
         (block $done (loop $again
             (br_if $done (i32.ge_u (global.get $at) (global.get $end)))
             {blocks}
             (br_table {numbers} {last} (i32.rem_u (call $read_i8) (i32.const {count})))
             {cases}))",
        count = functions.len().max(1)
    );
    let helpers = format!(
        "(global $at (mut i32) (i32.const {PROGRAM})) (global $end (mut i32) (i32.const {PROGRAM}))
         (func $decode (param $from i32) (param $length i32)
             (local $index i32)
             (block $done (loop $next
                 (br_if $done (i32.ge_u (i32.add (local.get $index) (i32.const 1)) (local.get $length)))
                 (i32.store8 (global.get $end) (i32.or
                     (i32.shl (i32.sub (i32.load8_u (i32.add (local.get $from) (local.get $index))) (i32.const 65)) (i32.const 4))
                     (i32.sub (i32.load8_u offset=1 (i32.add (local.get $from) (local.get $index))) (i32.const 65))))
                 (global.set $end (i32.add (global.get $end) (i32.const 1)))
                 (local.set $index (i32.add (local.get $index) (i32.const 2)))
                 (br $next))))
         (func $skip (param i32) (result i32)
             (global.get $at) (global.set $at (i32.add (global.get $at) (local.get 0))))
         (func $read_i8 (result i32) (i32.load8_u (call $skip (i32.const 1))))
         (func $read_i32 (result i32) (i32.load align=1 (call $skip (i32.const 4))))
         (func $read_i64 (result i64) (i64.load align=1 (call $skip (i32.const 8))))
         (func $read_f32 (result f32) (f32.load align=1 (call $skip (i32.const 4))))
         (func $read_f64 (result f64) (f64.load align=1 (call $skip (i32.const 8))))"
    );
    around(&imports, &on_message, &helpers)
}

/// Wraps code into a module with these imports that runs it for each message and replies with the message's
/// text. Local 0 is the message.
fn around(imports: &str, on_message: &str, helpers: &str) -> String {
    let texts: String = (0..TEXTS.len())
        .map(|index| {
            format!("(data (i32.const {}) \"{}\")\n", text_at(index), TEXTS[index].replace('"', "\\\""))
        })
        .collect();
    format!(
        r#"(module
        {imports}
        (memory (export "memory") 4)
        (global $free (mut i32) (i32.const 0x2000))
        (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
            (local $at i32)
            (local.set $at (i32.and (i32.add (global.get $free) (i32.const 15)) (i32.const -16)))
            (global.set $free (i32.add (local.get $at) (local.get 3)))
            (block $fits
                (br_if $fits (i32.le_u (global.get $free) (i32.mul (memory.size) (i32.const 65536))))
                (drop (memory.grow (i32.add (i32.const 1) (i32.shr_u (local.get 3) (i32.const 16))))))
            (local.get $at))
        {texts}
        {helpers}
        (data (i32.const 16) "described")
        (data (i32.const 64) "\10\00\00\00\09\00\00\00")
        (func (export "skep:agent/handler@0.1.1#describe") (result i32) (i32.const 64))
        (func (export "skep:agent/handler@0.1.1#on-message") (param i32) (result i32)
            {on_message}
            (i64.store offset=4 (i32.const 128) (i64.load (local.get 0)))
            (i32.const 128)))"#
    )
}

fn encode(resolve: &Resolve, world: WorldId, module: &str) -> Vec<u8> {
    let mut module = wat::parse_str(module).expect("the text is WebAssembly");
    embed_component_metadata(&mut module, resolve, world, StringEncoding::UTF8).expect("the world is valid");
    ComponentEncoder::default()
        .validate(true)
        .module(&module)
        .and_then(|mut encoder| encoder.encode())
        .expect("the module fits the world")
}

fn text_at(index: usize) -> i32 {
    (TEXTS_AT + TEXTS[..index].iter().map(|text| text.len()).sum::<usize>()) as i32
}

fn wat_type(one: WasmType) -> &'static str {
    match one {
        WasmType::I32 | WasmType::Pointer | WasmType::Length => "i32",
        WasmType::I64 | WasmType::PointerOrI64 => "i64",
        WasmType::F32 => "f32",
        WasmType::F64 => "f64",
    }
}

fn size(one: WasmType) -> usize {
    match wat_type(one) {
        "i64" | "f64" => 8,
        _ => 4,
    }
}
