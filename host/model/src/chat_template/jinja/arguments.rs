//! The arguments of a filter, a test, a method or a function.

use super::{Fault, Value, syntax::Name};

#[derive(Debug, Default)]
pub(super) struct Values {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Name, Value)>,
}

impl Values {
    /// Assigns the arguments to these parameter names. An excess or unknown argument is an error.
    pub(super) fn bind<const COUNT: usize>(
        self,
        what: &str,
        names: [&str; COUNT],
    ) -> Result<[Option<Value>; COUNT], Fault> {
        let mut bound = [const { None }; COUNT];
        if self.positional.len() > COUNT {
            return Err(Fault::new(format!("{what} takes at most {COUNT} arguments")));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == &*name) {
                Some(index) if bound[index].is_none() => bound[index] = Some(value),
                _ => return Err(Fault::new(format!("{what} does not take the argument {name:?}"))),
            }
        }
        Ok(bound)
    }

    pub(super) fn none(self, what: &str) -> Result<(), Fault> {
        self.bind(what, []).map(|[]| ())
    }

    /// Returns the only argument, which is required.
    pub(super) fn one(self, what: &str, name: &str) -> Result<Value, Fault> {
        let [value] = self.bind(what, [name])?;
        value.ok_or_else(|| Fault::new(format!("{what} requires the argument {name:?}")))
    }
}

/// Returns an optional string.
pub(super) fn text<'v>(value: &'v Option<Value>, what: &str) -> Result<Option<&'v str>, Fault> {
    match value {
        None | Some(Value::None | Value::Undefined) => Ok(None),
        Some(value) => {
            let wrong = || Fault::new(format!("{what} expects a string, not {}", value.kind()));
            value.as_text().map(Some).ok_or_else(wrong)
        }
    }
}

/// Returns an optional whole number.
pub(super) fn integer(value: &Option<Value>, what: &str) -> Result<Option<i128>, Fault> {
    match value {
        None | Some(Value::None | Value::Undefined) => Ok(None),
        Some(value) => {
            let wrong = || Fault::new(format!("{what} expects a whole number, not {}", value.kind()));
            value.as_integer().map(Some).ok_or_else(wrong)
        }
    }
}

pub(super) fn is_true(value: &Option<Value>) -> bool {
    value.as_ref().is_some_and(Value::is_true)
}
