"""How a run is carried out: units of chains, blocks of steps, draws that are never lost."""
