"""Python imports this module when it starts an observed script. It installs the observer when torch is imported.

Another sitecustomize on the path runs first, as without the observer. No error in this module may end the script.
"""

import os
import sys


def _chain() -> None:
    """Run the first other sitecustomize on the path, which this module hides."""
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        path = os.path.join(folder or os.getcwd(), "sitecustomize.py")
        if os.path.abspath(folder or os.getcwd()) != here and os.path.isfile(path):
            spec = importlib.util.spec_from_file_location("sitecustomize", path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                sys.modules["sitecustomize"] = module
                spec.loader.exec_module(module)
            return


class _AfterTorch:
    """A finder that calls the observer when the import of torch has ended. It finds nothing itself."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            try:
                from testbed.attach.observer import install

                install()
            except BaseException as error:  # the script runs without the observer
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                print(f"testbed: the script is not observed ({type(error).__name__}: {error})", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


try:
    if __name__ == "sitecustomize":  # else attach/__main__.py runs it, after Python has run the other one
        _chain()
finally:
    if os.environ.get("TESTBED_OBSERVER"):
        sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]
