//! Estimates the cost of compiling a component from its bytes, before anything is compiled.
//!
//! The size of a file does not bound the size of its compiled code: a local variable takes no bytes but must be initialized,
//! and a nested component is compiled wherever it is instantiated, so that thirty levels of two instances each make a
//! billion. The weight is an upper bound for both.

use wasmparser::{
    BinaryReaderError, ComponentImport, ComponentInstance, ComponentTypeRef, FunctionBody, Parser, Payload,
};

/// Maximum weight of one function, because the compiler's time and memory grow faster than the function's size.
const MAX_FUNCTION_BYTES: u64 = 4 << 20;
/// A local variable compiles to about as much code as this many bytes of instructions.
const BYTES_PER_LOCAL: u64 = 8;
/// Maximum number of core and component instances after nested components are expanded. By default, a component may run
/// with at most 16 core instances.
const MAX_INSTANCES: u64 = 4_096;

/// A component whose sections are being read.
#[derive(Default)]
struct Scope {
    instances: u64,
}

/// Refuses a component whose code would be larger than `max_bytes`, or that has too many instances.
pub(super) fn check(bytes: &[u8], max_bytes: u64) -> Result<(), String> {
    measure(bytes, max_bytes).unwrap_or_else(|malformed| Err(malformed.to_string()))
}

fn measure(bytes: &[u8], max_bytes: u64) -> Result<Result<(), String>, BinaryReaderError> {
    let mut code_bytes = 0;
    // Modules and components that are being read, outermost first. A module is `None`.
    let mut open: Vec<Option<Scope>> = Vec::new();
    // The largest number of instances of any completely read component. Only those can be instantiated.
    let mut most_instances = 0;
    for payload in Parser::new(0).parse_all(bytes) {
        match payload? {
            Payload::Version { encoding, .. } => {
                open.push((encoding == wasmparser::Encoding::Component).then(Scope::default));
            }
            Payload::End(_) => {
                if let Some(Some(scope)) = open.pop() {
                    most_instances = most_instances.max(scope.instances);
                }
            }
            Payload::CodeSectionEntry(body) => {
                let size = weigh(&body)?;
                if size > MAX_FUNCTION_BYTES {
                    return Ok(Err(format!(
                        "one of its functions has the weight of {size} bytes of code, including local variables; at most \
                         {MAX_FUNCTION_BYTES} are allowed"
                    )));
                }
                code_bytes += size;
            }
            Payload::ComponentImportSection(imports) => {
                for import in imports {
                    let import: ComponentImport<'_> = import?;
                    if matches!(import.ty, ComponentTypeRef::Component(_)) {
                        let name = import.name.name;
                        return Ok(Err(format!(
                            "it imports the component {name:?} to instantiate it; only nested components may be instantiated"
                        )));
                    }
                }
            }
            Payload::InstanceSection(instances) => add(&mut open, u64::from(instances.count())),
            Payload::ComponentInstanceSection(instances) => {
                for instance in instances {
                    let made = match instance? {
                        ComponentInstance::Instantiate { .. } => most_instances.saturating_add(1),
                        ComponentInstance::FromExports(_) => 1,
                    };
                    add(&mut open, made);
                }
            }
            _ => {}
        }
        let instances = open.iter().flatten().map(|scope| scope.instances).max().unwrap_or(0);
        if instances > MAX_INSTANCES {
            return Ok(Err(format!(
                "its nested components expand to more than {MAX_INSTANCES} instances; compose fewer components"
            )));
        }
        if code_bytes > max_bytes {
            return Ok(Err(format!(
                "its functions have the weight of more than {max_bytes} bytes of code, including local variables; \
                 `max_component_bytes` under [runtime] in skep.toml sets the limit"
            )));
        }
    }
    Ok(Ok(()))
}

fn add(open: &mut [Option<Scope>], instances: u64) {
    if let Some(Some(scope)) = open.last_mut() {
        scope.instances = scope.instances.saturating_add(instances);
    }
}

fn weigh(body: &FunctionBody<'_>) -> Result<u64, BinaryReaderError> {
    let range = body.range();
    let mut size = (range.end - range.start) as u64;
    for group in body.get_locals_reader()? {
        let (count, _type) = group?;
        size = size.saturating_add(u64::from(count) * BYTES_PER_LOCAL);
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(text: &str) -> Result<(), String> {
        check(&wat::parse_str(text).expect("the text is WebAssembly"), 1 << 20)
    }

    #[test]
    fn nested_instances_are_counted_after_expansion() {
        let nested = |levels: usize| {
            let mut inner = "(component $c0)".to_owned();
            for level in 1..=levels {
                let below = level - 1;
                inner = format!(
                    "(component $c{level} {inner} (instance (instantiate $c{below})) (instance (instantiate $c{below})))"
                );
            }
            format!("(component {inner} (instance (instantiate $c{levels})))")
        };
        verdict(&nested(8)).expect("255 instances");
        let bomb = nested(40);
        let message = verdict(&bomb).expect_err("a million million instances");
        assert!(message.contains("instances"), "{message}");
        assert!(wat::parse_str(&bomb).expect("valid").len() < 4 << 10);
    }

    #[test]
    fn locals_count_as_code() {
        let module = |functions: usize| {
            let function = format!("(func (local {}))", "i64 ".repeat(10_000));
            format!("(component (core module {}))", function.repeat(functions))
        };
        verdict(&module(10)).expect("a hundred thousand locals");
        let message = verdict(&module(20)).expect_err("1.6 MB");
        assert!(message.contains("max_component_bytes"), "{message}");
    }

    #[test]
    fn rejects_an_imported_component_that_would_be_instantiated() {
        let message = verdict("(component (import \"x\" (component $x)) (instance (instantiate $x)))");
        assert!(message.expect_err("its instances cannot be counted").contains("\"x\""));
    }
}
