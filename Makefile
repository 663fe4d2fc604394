# Each command is one of dev.py, which works without make too.
# Arguments go through ARGS: make test ARGS="tests/unit/log -x"
PYTHON ?= python3
COMMANDS = setup demo test check test-all test-long docs bench uv clean help

.DEFAULT_GOAL = help
.PHONY: $(COMMANDS)
$(COMMANDS):
	@$(PYTHON) dev.py $@ $(ARGS)
