"""Sandboxes of agents behind one interface (`interface.Sandbox`): what is started in place of an agent's command, and what ends it.

Guarantees, each asserted by a test:

- an agent in a sandbox reaches no network but the gateway, at the address that it has outside;
- what is in a sandbox ends with the process of its gateway, however that ends, also where nobody is left to end it;
- a sandbox that this machine has not is refused by the name of its key before an engine is started.
"""
