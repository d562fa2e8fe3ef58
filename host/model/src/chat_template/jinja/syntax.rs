//! The syntax tree of a template. Chains of operators are flat lists, so the tree nests no deeper than the parser
//! allows.

use std::sync::Arc;

pub(super) type Name = Arc<str>;

#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: u32,
    pub(super) kind: Statement,
}

#[derive(Debug)]
pub(super) enum Statement {
    Raw(String),
    Emit(Expression),
    For(Arc<For>),
    /// Runs the first branch whose condition holds, or else the last list.
    If(Vec<(Expression, Vec<Node>)>, Vec<Node>),
    Set(Vec<Target>, Expression),
    SetBlock {
        target: Target,
        filters: Vec<Step>,
        body: Vec<Node>,
    },
    With(Vec<(Vec<Target>, Expression)>, Vec<Node>),
    Macro(Arc<Macro>),
    /// A call of a macro, with the block that the macro can call as `caller`.
    Call {
        call: Expression,
        caller: Arc<Macro>,
    },
    Filter {
        filters: Vec<Step>,
        body: Vec<Node>,
    },
    /// A body that runs in the current scope. Blocks are such bodies, because there is no inheritance.
    Body(Vec<Node>),
    Do(Expression),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) line: u32,
    pub(super) targets: Vec<Target>,
    pub(super) items: Expression,
    pub(super) condition: Option<Expression>,
    pub(super) recursive: bool,
    pub(super) body: Vec<Node>,
    /// The body that runs if there are no items.
    pub(super) otherwise: Vec<Node>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Name,
    pub(super) parameters: Vec<(Name, Option<Expression>)>,
    pub(super) body: Vec<Node>,
}

/// A target of an assignment. If there are several, each takes one element of the value.
#[derive(Debug)]
pub(super) enum Target {
    Variable(Name),
    /// An attribute of a namespace.
    Attribute(Name, Name),
}

#[derive(Debug)]
pub(super) enum Expression {
    Text(Arc<str>),
    Integer(i128),
    Float(f64),
    Boolean(bool),
    None,
    Variable(Name),
    List(Vec<Expression>),
    Map(Vec<(Expression, Expression)>),
    Not(Box<Expression>),
    Negative(Box<Expression>),
    /// Operators of the same precedence, applied from left to right.
    Arithmetic(Box<Expression>, Vec<(Arithmetic, Expression)>),
    Compare(Box<Expression>, Vec<(Comparison, Expression)>),
    And(Vec<Expression>),
    Or(Vec<Expression>),
    Choice {
        condition: Box<Expression>,
        then: Box<Expression>,
        otherwise: Option<Box<Expression>>,
    },
    /// A value and the steps that are applied to it in order.
    Steps(Box<Expression>, Vec<Step>),
}

#[derive(Debug)]
pub(super) enum Step {
    Attribute(Name),
    Item(Expression),
    Slice([Option<Expression>; 3]),
    Call(Arguments),
    Filter(Name, Arguments),
    Test { name: Name, arguments: Arguments, negated: bool },
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expression>,
    pub(super) named: Vec<(Name, Expression)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    DivideDown,
    Remainder,
    Power,
    Join,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}
