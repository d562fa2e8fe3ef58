//! Executes statements: scopes, loops, macros, and the destination of the text.

use super::{
    Fault, Meter, Value,
    arguments::Values,
    syntax::{Expression, For, Macro, Name, Node, Statement, Step, Target},
    value::{Function, List, Loop},
};
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

/// Maximum nesting of statements, expressions and calls during a render.
const MAX_DEPTH: u32 = 300;
/// Bytes charged for the state that is kept while a loop runs.
const LOOP_BYTES: usize = 256;
/// Bytes charged for an attribute of a namespace, not counting the contents of its value.
const ATTRIBUTE_BYTES: usize = 128;

/// A render in progress.
pub(super) struct Render<'m> {
    pub(super) meter: &'m Meter,
    scopes: Vec<Scope>,
    /// The texts being written. The last one belongs to the innermost block that produces a value.
    texts: Vec<String>,
    depth: u32,
}

/// A scope of variables. Scopes are freed when they end, so their memory is not charged to the meter. The depth
/// limits how many there are, and because looking up a variable takes steps, the steps limit what is in them.
struct Scope {
    /// The enclosing scope; `None` only for the outermost one.
    parent: Option<usize>,
    variables: Vec<(Name, Value)>,
}

/// The way in which a list of statements finished.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

impl<'m> Render<'m> {
    pub(super) fn new(variables: Vec<(&str, Value)>, meter: &'m Meter) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value)).collect();
        Render { meter, scopes: vec![Scope { parent: None, variables }], texts: Vec::new(), depth: 0 }
    }

    /// Returns the text that these statements write.
    pub(super) fn text(&mut self, nodes: &[Node]) -> Result<String, Fault> {
        self.texts.push(String::new());
        let ran = self.run(nodes);
        let text = self.texts.pop().unwrap_or_default();
        ran.map(|_flow| text)
    }

    /// Runs `run` one level deeper, and fails if that is too deep.
    pub(super) fn deeper<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Fault>) -> Result<T, Fault> {
        if self.depth >= MAX_DEPTH {
            return Err(Fault::new(format!("calls and blocks nest deeper than {MAX_DEPTH}")));
        }
        self.depth += 1;
        let result = run(self);
        self.depth -= 1;
        result
    }

    pub(super) fn lookup(&self, name: &str) -> Result<Option<Value>, Fault> {
        let mut scope = self.scopes.last();
        while let Some(Scope { parent, variables }) = scope {
            self.meter.step(1 + variables.len() / 8)?;
            if let Some((_, value)) = variables.iter().find(|(known, _)| &**known == name) {
                return Ok(Some(value.clone()));
            }
            scope = parent.map(|parent| &self.scopes[parent]);
        }
        Ok(None)
    }

    fn set(&mut self, name: &Name, value: Value) -> Result<(), Fault> {
        let scope = self.scopes.last_mut().expect("the outermost scope is never removed");
        self.meter.step(1 + scope.variables.len() / 8)?;
        match scope.variables.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => scope.variables.push((name.clone(), value)),
        }
        Ok(())
    }

    fn write(&mut self, text: &str) -> Result<(), Fault> {
        self.meter.make(text.len())?;
        self.texts.last_mut().expect("a render always has an open text").push_str(text);
        Ok(())
    }

    /// Runs `run` in a new scope below `parent`.
    fn in_scope<T>(
        &mut self,
        parent: usize,
        run: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.meter.step(1)?;
        let depth = self.scopes.len();
        self.scopes.push(Scope { parent: Some(parent), variables: Vec::new() });
        let result = self.deeper(run);
        self.scopes.truncate(depth);
        result
    }

    fn here(&self) -> usize {
        self.scopes.len() - 1
    }

    fn run(&mut self, nodes: &[Node]) -> Result<Flow, Fault> {
        for node in nodes {
            self.meter.step(1)?;
            let flow = self.statement(&node.kind).map_err(|fault| fault.at(node.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &Statement) -> Result<Flow, Fault> {
        match statement {
            Statement::Raw(text) => self.write(text)?,
            Statement::Emit(value) => {
                let value = self.value(value)?;
                self.emit(&value)?;
            }
            Statement::For(syntax) => {
                let items = self.value(&syntax.items)?;
                self.repeat(syntax, &items, 0)?;
            }
            Statement::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.value(condition)?.is_true() {
                        return self.deeper(|render| render.run(body));
                    }
                }
                return self.deeper(|render| render.run(otherwise));
            }
            Statement::Set(targets, value) => {
                let value = self.value(value)?;
                self.assign(targets, value)?;
            }
            Statement::SetBlock { target, filters, body } => {
                let value = self.filtered(filters, body)?;
                self.assign(std::slice::from_ref(target), value)?;
            }
            Statement::With(values, body) => {
                return self.in_scope(self.here(), |render| {
                    for (targets, value) in values {
                        let value = render.value(value)?;
                        render.assign(targets, value)?;
                    }
                    render.run(body)
                });
            }
            Statement::Macro(syntax) => {
                let function = Value::Macro(Function { syntax: syntax.clone(), scope: 0 });
                self.set(&syntax.name, function)?;
            }
            Statement::Call { call, caller } => {
                let caller = Value::Macro(Function { syntax: caller.clone(), scope: self.here() });
                let value = self.call_with(call, caller)?;
                self.emit(&value)?;
            }
            Statement::Filter { filters, body } => {
                let value = self.filtered(filters, body)?;
                self.emit(&value)?;
            }
            Statement::Body(body) => return self.deeper(|render| render.run(body)),
            Statement::Do(value) => {
                self.value(value)?;
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn emit(&mut self, value: &Value) -> Result<(), Fault> {
        let text = self.texts.last_mut().expect("a render always has an open text");
        value.show(text, self.meter)
    }

    /// Returns the text that a body writes, after applying the filters.
    fn filtered(&mut self, filters: &[Step], body: &[Node]) -> Result<Value, Fault> {
        let text = self.deeper(|render| render.text(body))?;
        let mut value = Value::text(&text, self.meter)?;
        for filter in filters {
            value = self.step(value, filter)?;
        }
        Ok(value)
    }

    fn assign(&mut self, targets: &[Target], value: Value) -> Result<(), Fault> {
        if let [target] = targets {
            return self.assign_one(target, value);
        }
        let items = value.items(self.meter)?;
        if items.items().len() != targets.len() {
            let (names, values) = (targets.len(), items.items().len());
            return Err(Fault::new(format!("{values} values cannot be assigned to {names} names")));
        }
        targets.iter().zip(items.items()).try_for_each(|(target, item)| self.assign_one(target, item.clone()))
    }

    fn assign_one(&mut self, target: &Target, value: Value) -> Result<(), Fault> {
        let (name, attribute) = match target {
            Target::Variable(name) => return self.set(name, value),
            Target::Attribute(name, attribute) => (name, attribute),
        };
        let Some(Value::Namespace(namespace)) = self.lookup(name)? else {
            return Err(Fault::new("only attributes of a namespace can be set"));
        };
        if !value.is_plain() {
            return Err(Fault::new(format!("{} cannot be stored in a namespace", value.kind())));
        }
        let mut attributes = namespace.borrow_mut();
        self.meter.step(1 + attributes.len() / 8)?;
        match attributes.iter_mut().find(|(known, _)| known == attribute) {
            Some((_, known)) => *known = value,
            None => {
                self.meter.make(ATTRIBUTE_BYTES)?;
                attributes.push((attribute.clone(), value));
            }
        }
        Ok(())
    }

    fn repeat(&mut self, syntax: &Arc<For>, items: &Value, depth: usize) -> Result<(), Fault> {
        let parent = self.here();
        let mut items = items.items(self.meter)?;
        if let Some(condition) = &syntax.condition {
            items = self.in_scope(parent, |render| render.chosen(syntax, condition, &items))?;
        }
        if items.items().is_empty() {
            return self.deeper(|render| render.run(&syntax.otherwise)).map(drop);
        }
        let state = Rc::new(Loop {
            syntax: syntax.clone(),
            scope: parent,
            items,
            index: Cell::new(0),
            depth,
            changed: RefCell::default(),
        });
        let name: Name = "loop".into();
        self.meter.make(LOOP_BYTES)?;
        for index in 0..state.items.items().len() {
            self.meter.step(1)?;
            state.index.set(index);
            let flow = self.in_scope(parent, |render| {
                render.set(&name, Value::Loop(state.clone()))?;
                render.assign(&syntax.targets, state.items.items()[index].clone())?;
                render.run(&syntax.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// Returns the items for which the condition of a loop holds.
    fn chosen(&mut self, syntax: &For, condition: &Expression, items: &List) -> Result<Rc<List>, Fault> {
        let mut chosen = Vec::new();
        for item in items.items() {
            self.meter.step(1)?;
            self.assign(&syntax.targets, item.clone())?;
            if self.value(condition)?.is_true() {
                chosen.push(item.clone());
            }
        }
        Value::list(chosen, self.meter)?.items(self.meter)
    }

    /// Runs `loop(items)` of a recursive loop and returns its text.
    pub(super) fn recurse(&mut self, state: &Loop, items: &Value) -> Result<Value, Fault> {
        if !state.syntax.recursive {
            return Err(Fault::new("the loop is not recursive").at(state.syntax.line));
        }
        self.texts.push(String::new());
        let ran = self.in_scope(state.scope, |render| render.repeat(&state.syntax, items, state.depth + 1));
        let text = self.texts.pop().unwrap_or_default();
        ran?;
        Value::text(&text, self.meter)
    }

    /// Runs a macro and returns its text. The macro can call `caller` by that name.
    pub(super) fn call_macro(
        &mut self,
        function: &Function,
        arguments: Values,
        caller: Option<Value>,
    ) -> Result<Value, Fault> {
        let Function { syntax, scope } = function;
        // The block around a caller may have ended.
        if *scope >= self.scopes.len() {
            return Err(Fault::new("a macro is called after the block around it has ended"));
        }
        let text = self.in_scope(*scope, |render| {
            render.bind(syntax, arguments)?;
            if let Some(caller) = caller {
                render.set(&"caller".into(), caller)?;
            }
            render.text(&syntax.body)
        })?;
        Value::text(&text, self.meter)
    }

    fn bind(&mut self, syntax: &Macro, arguments: Values) -> Result<(), Fault> {
        let Values { positional, named } = arguments;
        if positional.len() > syntax.parameters.len() {
            let (name, count) = (&syntax.name, syntax.parameters.len());
            return Err(Fault::new(format!("the macro {name:?} takes at most {count} arguments")));
        }
        for (name, _) in &named {
            if syntax.parameters.iter().all(|(known, _)| known != name) {
                return Err(Fault::new(format!(
                    "the macro {:?} does not take the argument {name:?}",
                    syntax.name
                )));
            }
        }
        let mut positional = positional.into_iter();
        for (name, default) in &syntax.parameters {
            let given = positional
                .next()
                .or_else(|| named.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()));
            let value = match (given, default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.value(default)?,
                (None, None) => Value::Undefined,
            };
            self.set(name, value)?;
        }
        Ok(())
    }
}
