//! A view of a JSON value that counts how often it is looked at, and ends a validation that looks too often or
//! nests too deeply.
//!
//! The library cannot be asked to stop. The view unwinds through it instead, which leaves nothing behind: a validation
//! changes nothing but its own stack.

use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use jsonschema::JsonType;
use jsonschema::json::{Array, Json, NodeIdentity, Object, unique};
use serde_json::{Map, Number, Value};

/// Steps for any value. A step takes 2 to 15 ns.
const STEPS: usize = 1_000_000;
/// More steps for each value inside it.
const STEPS_PER_VALUE: usize = 100;
/// Bytes of a string that a pattern, a format or a comparison reads in a step.
const BYTES_PER_STEP: usize = 16;
/// Schemas that look at nothing and are applied in the time of a step.
const UNSEEN_PER_STEP: usize = 128;
/// Additional steps for each string if a pattern has lookaround or backreferences.
const BACKTRACKING_STEPS: usize = 200;
/// Bytes of stack that a validation may use. Guests' calls run on fibers that have 1.5 MiB for the host.
const MAX_STACK_BYTES: usize = 512 << 10;

/// The costs of looking at a value under one schema.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    look: usize,
    string: usize,
}

/// The limit was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Exhausted;

/// The remaining steps of a validation, and the cost of one lookup.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    left: usize,
    rates: Rates,
}

#[derive(Clone, Copy)]
struct Meter {
    budget: Budget,
    /// The address of a variable in the frame that began the validation.
    stack_start: usize,
}

thread_local! {
    /// The meter of the validation that runs on this thread: looks at the value have no other way to find it.
    static METER: Cell<Option<Meter>> = const { Cell::new(None) };
}

impl Rates {
    /// Returns the rates for a schema. `unseen_steps` is how many schemas may be applied between two looks at the value.
    pub fn new(schema: &Value, unseen_steps: usize) -> Self {
        let backtracks = if may_backtrack(schema) { BACKTRACKING_STEPS } else { 0 };
        Rates { look: 1 + unseen_steps / UNSEEN_PER_STEP, string: 1 + backtracks }
    }

    /// Returns the budget of one validation of a value.
    pub fn budget(&self, value: &Value) -> Budget {
        let each = self.look * STEPS_PER_VALUE;
        let inside = steps_inside(value, &|text| each + 4 * (self.string + text / BYTES_PER_STEP), each);
        Budget { left: self.look * STEPS + inside, rates: *self }
    }
}

/// Returns whether a pattern may have lookaround or backreferences. Strings that are not patterns may match too.
fn may_backtrack(schema: &Value) -> bool {
    let odd = |text: &str| {
        text.contains("(?")
            || text.as_bytes().windows(2).any(|two| two[0] == b'\\' && two[1].is_ascii_digit())
    };
    match schema {
        Value::String(text) => odd(text),
        Value::Array(items) => items.iter().any(may_backtrack),
        Value::Object(members) => members.iter().any(|(name, member)| odd(name) || may_backtrack(member)),
        _ => false,
    }
}

/// Sums up the value and all values inside it: `string` of the length of strings and names, and `other` for each of the rest.
fn steps_inside(value: &Value, string: &impl Fn(usize) -> usize, other: usize) -> usize {
    match value {
        Value::String(text) => string(text.len()),
        Value::Array(items) => {
            other + items.iter().map(|item| steps_inside(item, string, other)).sum::<usize>()
        }
        Value::Object(members) => {
            let member =
                |(name, member): (&String, &Value)| string(name.len()) + steps_inside(member, string, other);
            other + members.iter().map(member).sum::<usize>()
        }
        _ => other,
    }
}

/// Runs a validation through [`Node`], or as much of it as the budget allows.
pub(super) fn metered<T>(budget: Budget, validate: impl FnOnce() -> T) -> Result<T, Exhausted> {
    let here = 0_u8;
    let stack_start = std::ptr::from_ref(&here).addr();
    let meter = Meter { budget, stack_start };
    let before = METER.replace(Some(meter));
    let result = catch_unwind(AssertUnwindSafe(validate));
    METER.set(before);
    result.map_err(|cause| if cause.is::<Exhausted>() { Exhausted } else { resume_unwind(cause) })
}

fn spend(steps: impl FnOnce(Rates) -> usize) {
    let Some(mut meter) = METER.get() else { return };
    let here = 0_u8;
    let stack_bytes = meter.stack_start.abs_diff(std::ptr::from_ref(&here).addr());
    let left =
        meter.budget.left.checked_sub(steps(meter.budget.rates)).filter(|_| stack_bytes <= MAX_STACK_BYTES);
    let Some(left) = left else {
        // This does not call the panic hook, because it is not a bug.
        resume_unwind(Box::new(Exhausted));
    };
    meter.budget.left = left;
    METER.set(Some(meter));
}

fn look() {
    spend(|rates| rates.look);
}

/// Charges for reading a string or comparing with one.
fn read(text: &str) {
    spend(|rates| rates.look + rates.string + text.len() / BYTES_PER_STEP);
}

/// The representation of JSON that the library validates.
pub(super) struct Metered;

/// A value that counts how often it is looked at.
#[derive(Clone, Copy)]
pub(super) struct Node<'a>(pub &'a Value);

pub(super) struct Members<'a>(&'a Map<String, Value>);

pub(super) struct Elements<'a>(&'a [Value]);

impl Json for Metered {
    type Node<'a> = Node<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, string: &str, f: impl FnOnce(Node<'_>) -> T) -> T {
        *buffer = Value::String(string.to_owned());
        f(Node(buffer))
    }
}

impl<'a> jsonschema::json::Node<'a, Metered> for Node<'a> {
    type Object = Members<'a>;
    type Array = Elements<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<Members<'a>> {
        look();
        self.0.as_object().map(Members)
    }

    fn as_array(&self) -> Option<Elements<'a>> {
        look();
        self.0.as_array().map(|items| Elements(items))
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        look();
        let text = self.0.as_str()?;
        read(text);
        Some(Cow::Borrowed(text))
    }

    fn as_number(&self) -> Option<&'a Number> {
        look();
        self.0.as_number()
    }

    fn as_boolean(&self) -> Option<bool> {
        look();
        self.0.as_bool()
    }

    fn is_null(&self) -> bool {
        look();
        self.0.is_null()
    }

    fn json_type(&self) -> JsonType {
        look();
        match self.0 {
            Value::Null => JsonType::Null,
            Value::Bool(_) => JsonType::Boolean,
            Value::Number(_) => JsonType::Number,
            Value::String(_) => JsonType::String,
            Value::Array(_) => JsonType::Array,
            Value::Object(_) => JsonType::Object,
        }
    }

    fn equals_value(&self, expected: &Value) -> bool {
        // A comparison reads no more of the value than there is to compare with.
        match expected {
            Value::String(text) => read(text),
            Value::Array(_) | Value::Object(_) => {
                let steps = steps_inside(expected, &|bytes| 1 + bytes / BYTES_PER_STEP, 1);
                spend(|rates| rates.look + steps);
            }
            _ => look(),
        }
        jsonschema::json::cmp::equal(self.0, expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        look();
        Cow::Borrowed(self.0)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        look();
        Some(NodeIdentity::new(std::ptr::from_ref(self.0).addr()))
    }
}

impl<'a> Object<'a, Metered> for Members<'a> {
    type Node = Node<'a>;
    type MemberName = &'a str;
    type MembersIter = MembersIter<'a>;

    fn len(&self) -> usize {
        look();
        self.0.len()
    }

    fn get(&self, key: &String) -> Option<Node<'a>> {
        look();
        self.0.get(key.as_str()).map(Node)
    }

    fn members(&self) -> MembersIter<'a> {
        MembersIter(self.0.iter())
    }
}

impl<'a> Array<'a, Metered> for Elements<'a> {
    type Node = Node<'a>;
    type ElementsIter = ElementsIter<'a>;

    fn len(&self) -> usize {
        look();
        self.0.len()
    }

    fn elements(&self) -> ElementsIter<'a> {
        ElementsIter(self.0.iter())
    }

    fn is_unique(&self) -> bool {
        let steps: usize =
            self.0.iter().map(|item| steps_inside(item, &|bytes| 1 + bytes / BYTES_PER_STEP, 1)).sum();
        spend(|rates| rates.look + 4 * steps);
        unique::is_unique(self.0)
    }
}

pub(super) struct MembersIter<'a>(serde_json::map::Iter<'a>);

impl<'a> Iterator for MembersIter<'a> {
    type Item = (&'a str, Node<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, member) = self.0.next()?;
        // A name is compared with patterns.
        read(name);
        Some((name, Node(member)))
    }
}

pub(super) struct ElementsIter<'a>(std::slice::Iter<'a, Value>);

impl<'a> Iterator for ElementsIter<'a> {
    type Item = Node<'a>;

    fn next(&mut self) -> Option<Node<'a>> {
        look();
        self.0.next().map(Node)
    }
}
